"""Reports for people and programs: status, Events, metrics and the page, made from a snapshot and a decision."""
