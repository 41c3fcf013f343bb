"""`bayflower natural`: a benchmark of clients that really differ.

sets      the data sets: what is read, the network, the decision
protocol  who trains on which samples, the same for every rival
exact     the posterior of a linear hierarchy by Gibbs sampling
forecast  predictions of trained models
rivals    who takes part
scores    what judges predictions
runs      one line of a file a finished run
summary   paired intervals, the leaderboard
words     what this tells a practitioner
page      one page with plots
"""
