"""The operators' page at /ops: a website that shows and does what the operators' commands show and do.

`site` contains what every page needs: the visitor, database sessions, forms, responses. Each subject is a module with a
function `routes(site)`, and `application` lists these functions. Pages contain no SQL: they call `dispatcher.ops` and
the stores.
"""
