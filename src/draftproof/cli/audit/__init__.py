"""`draftproof audit`: tests of an endpoint."""
