"""The papers of data sets, as entries of BibTeX."""

from __future__ import annotations

from .citations import Entry, arxiv, at, paper

DATA: dict[str, Entry] = {
    "fmnist": paper(
        "misc",
        "xiao2017fmnist",
        "Xiao, Han and Rasul, Kashif and Vollgraf, Roland",
        "Fashion-MNIST: a Novel Image Dataset for Benchmarking Machine Learning Algorithms",
        2017,
        **arxiv("1708.07747"),
    ),
    "mnist": paper(
        "article",
        "lecun1998mnist",
        "LeCun, Yann and Bottou, L{\\'e}on and Bengio, Yoshua and Haffner, Patrick",
        "Gradient-Based Learning Applied to Document Recognition",
        1998,
        journal="Proceedings of the IEEE",
    ),
    "cifar10": paper(
        "techreport",
        "krizhevsky2009cifar",
        "Krizhevsky, Alex",
        "Learning Multiple Layers of Features from Tiny Images",
        2009,
        institution="University of Toronto",
    ),
    "emnist": paper(
        "inproceedings",
        "cohen2017emnist",
        "Cohen, Gregory and Afshar, Saeed and Tapson, Jonathan and van Schaik, Andr{\\'e}",
        "EMNIST: Extending MNIST to Handwritten Letters",
        2017,
        **at("IJCNN"),
    ),
    "officecaltech": paper(
        "inproceedings",
        "gong2012office",
        "Gong, Boqing and Shi, Yuan and Sha, Fei and Grauman, Kristen",
        "Geodesic Flow Kernel for Unsupervised Domain Adaptation",
        2012,
        **at("CVPR"),
    ),
    "femnist": paper(
        "misc",
        "caldas2018leaf",
        "Caldas, Sebastian and Duddu, Sai Meher Karthik and Wu, Peter and Li, Tian and "
        "Kone{\\v{c}}n{\\'y}, Jakub and McMahan, H. Brendan and Smith, Virginia and Talwalkar, "
        "Ameet",
        "LEAF: A Benchmark for Federated Settings",
        2018,
        **arxiv("1812.01097"),
    ),
    "celeba": paper(
        "inproceedings",
        "liu2015celeba",
        "Liu, Ziwei and Luo, Ping and Wang, Xiaogang and Tang, Xiaoou",
        "Deep Learning Face Attributes in the Wild",
        2015,
        **at("ICCV"),
    ),
    "heart": paper(
        "misc",
        "janosi1988heart",
        "Janosi, Andras and Steinbrunn, William and Pfisterer, Matthias and Detrano, Robert",
        "Heart Disease",
        1988,
        howpublished="UCI Machine Learning Repository",
    ),
    "digits": paper(
        "misc",
        "alpaydin1998digits",
        "Alpaydin, E. and Kaynak, C.",
        "Optical Recognition of Handwritten Digits",
        1998,
        howpublished="UCI Machine Learning Repository",
    ),
}
