"""The routes of the HTTP app, one file per group; each makes a router around the same context."""
