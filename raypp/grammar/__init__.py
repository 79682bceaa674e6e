"""Grammars: compiled from schemas, regular expressions and EBNF, followed token by token, turned into bit masks.

All of it runs in a process of its own beside the driver, by xgrammar or llguidance; see `raypp.driver.grammars` for who
asks.
"""
