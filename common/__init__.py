"""Values shared by every role: ids, requests, layouts, settings, errors. Standard library only."""
