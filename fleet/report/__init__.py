"""What people and programs are told over HTTP, on a terminal and in Events, of a world and a decision."""
