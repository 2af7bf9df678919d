"""Bulk work: tables of rows in files, read and written so that a run can be resumed."""
