"""Images: what an image is (data in layers/ and roles/), and the small engine that makes it."""
