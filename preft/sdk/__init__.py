"""What a notebook uses: engines that speak text, results that show themselves, one function a command.

Everything here is also named by `preft` itself, and imported when it is first used.
"""
