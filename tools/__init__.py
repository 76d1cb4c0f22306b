"""Programs for the people who develop the project; nothing here is installed with it."""
