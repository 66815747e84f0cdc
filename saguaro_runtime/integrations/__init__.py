"""Saguaro inside other people's loops. Nothing of theirs is imported before its module is used.

transformers    `model.generate(**inputs, custom_generate=Saguaro(draft))`
candidates      a CandidateGenerator for transformers' own assisted loop
"""
