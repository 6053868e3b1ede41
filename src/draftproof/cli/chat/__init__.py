"""`draftproof chat` and `draftproof run`: clients, conversation, tools and terminal."""
