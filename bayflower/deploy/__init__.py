"""Deployments: keys and certificates, processes or containers, and runs with reliable exit codes.

`layout` describes a deployment's folder, `keys` makes keys and certificates, `compose` writes the
containers, `local` starts the same programs as processes, `gate` is the only server that clients
can reach, `runs` submits and follows runs, `docker` controls Docker. Only `superlink` imports flwr:
Flower's programs are started, not called.
"""
