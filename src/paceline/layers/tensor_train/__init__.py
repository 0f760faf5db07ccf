"""Layers whose weight is a tensor train: a chain of small cores in place of a large matrix.

shapes     how a matrix is cut into modes        svd        cores of a trained matrix, to a rank or an error
order      the cheapest order of contraction     product    carries it out
cost       whether it pays on this machine       convert    replaces layers of a model where it does
linear, embedding (with train): the layers       spread     one product over the members of a group
"""
