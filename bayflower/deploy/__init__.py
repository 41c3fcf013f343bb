"""Running a federation for real: keys and certificates, processes or containers, runs with true
exit codes.

`layout` says what lies where in a deployment's folder, `keys` makes what is secret, `compose`
writes the containers, `local` starts the same programs as processes, `gate` is the one door that
clients see, `runs` submits and follows, `engine` drives Docker. No module here imports flwr:
Flower's programs are started, not called.
"""
