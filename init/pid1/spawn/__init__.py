"""Starting processes and tracking which service owns them."""
