"""What is to run: the chart with its values, read as pods."""
