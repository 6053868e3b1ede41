"""Outputs that are not streamed, built from columns of many requests and steps at once."""
