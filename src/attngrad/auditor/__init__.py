"""The auditor: is this attention gradient right, and if not, what is the mistake?"""
