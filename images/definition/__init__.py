"""The definition of the images: data files, read strictly. Pure."""
