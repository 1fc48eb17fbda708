"""The page of `tiering web`: a small server, who may use it, and the files that a browser gets.

What the page shows is made by the commands and is handed in as `PageData`.
"""
