"""One cycle from fetch to publish, and the loop that schedules cycles."""
