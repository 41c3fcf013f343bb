"""What the owner of a site allows: the policy file and its rules, and the site's memory of what was
asked of it. Whatever the server sends, a client answers within its owner's policy.
"""
