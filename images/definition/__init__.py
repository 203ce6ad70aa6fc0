"""What an image is: the data files, read strictly. Pure."""
