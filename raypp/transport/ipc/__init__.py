"""Links through GPU memory that two processes of one node share: `ipc`."""
