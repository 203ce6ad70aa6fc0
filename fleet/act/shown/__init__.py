"""What people and programs are told over HTTP and on a terminal, of a world and a decision."""
