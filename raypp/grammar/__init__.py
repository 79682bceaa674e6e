"""Grammars: compiled from schemas, regular expressions and EBNF, followed token by token, turned into bit masks.

llguidance does it, in threads of the driver's process; see `raypp.driver.grammars` for what asks for it.
"""
