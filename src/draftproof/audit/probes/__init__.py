"""Tests of an endpoint, one file each."""
