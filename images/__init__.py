"""Container images: the definition (data in layers/ and roles/) and the engine that builds them."""
