"""Holds a measured cell against its baseline and gives the verdict."""
