"""Values shared by every role: ids, requests, layouts, configuration, errors. Standard library only."""
