"""`bayflower cite`: the BibTeX of what a run used."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from .. import __version__, methods
from ..errors import ConfigError
from .options import AsJson


def cite(
    what: Annotated[
        list[str], typer.Argument(metavar="METHOD|DIR", help="methods, or folders of runs")
    ],
    as_json: AsJson = False,
) -> None:
    """Print the BibTeX of what a run used: method, data set, Flower, Bayflower.

    Example: `bayflower cite fedmap >> references.bib`
    """
    found = entries(what)
    print(
        json.dumps([{"kind": kind, "key": key, **fields} for kind, key, fields in found])
        if as_json
        else bibtex(found)
    )


# stem of the method → (kind, key, fields)
Entry = tuple[str, str, dict[str, str]]
RAW = "bibtex"  # the only field of an entry that a method's row has as a text


def paper(kind: str, key: str, author: str, title: str, year: int, **more: str) -> Entry:
    """Return an entry."""
    return kind, key, {"author": author, "title": f"{{{title}}}", "year": str(year), **more}


def at(venue: str) -> dict[str, str]:
    """Return the field of a conference paper."""
    return {"booktitle": venue}


def arxiv(number: str) -> dict[str, str]:
    """Return the fields of a preprint."""
    return {"eprint": number, "archiveprefix": "arXiv"}


METHODS: dict[str, Entry] = {
    "fedmap": paper(
        "misc",
        "zhang2024fedmap",
        'Zhang, Fan and Esteve-Yag{\\"u}e, Carlos and Dittmer, S{\\"o}ren and Sch{\\"o}nlieb, '
        "Carola-Bibiane and Roberts, Michael",
        "FedMAP: Unlocking Potential in Personalized Federated Learning through Bi-Level MAP "
        "Optimization",
        2024,
        **arxiv("2405.19000"),
    ),
    "fedbps": paper(
        "misc",
        "luo2024fedbps",
        "Luo, Mengen and Kuruoglu, Ercan Engin",
        "Bayesian Neural Network For Personalized Federated Learning Parameter Selection",
        2024,
        **arxiv("2402.16091"),
    ),
    "pfedvmp": paper(
        "misc",
        "pfedvmp",
        "{The authors of pFedVMP}",
        "Personalized Federated Learning via Variational Message Passing",
        2025,
    ),
    "metavd": paper(
        "inproceedings",
        "jeon2023metavd",
        "Jeon, Insu and Hong, Minui and Yun, Junhyeog and Kim, Gunhee",
        "Federated Learning via Meta-Variational Dropout",
        2023,
        **at("Advances in Neural Information Processing Systems"),
    ),
    "fednp": paper(
        "inproceedings",
        "wu2023fednp",
        "Wu, Xueyang and Huang, Hengguan and Ding, Youlong and Wang, Hao and Wang, Ye and Xu, Qian",
        "FedNP: Towards Non-IID Federated Learning via Federated Neural Propagation",
        2023,
        **at("AAAI Conference on Artificial Intelligence"),
    ),
    "fedavg": paper(
        "inproceedings",
        "mcmahan2017fedavg",
        "McMahan, Brendan and Moore, Eider and Ramage, Daniel and Hampson, Seth and "
        'Ag{\\"u}era y Arcas, Blaise',
        "Communication-Efficient Learning of Deep Networks from Decentralized Data",
        2017,
        **at("AISTATS"),
    ),
    "fedprox": paper(
        "inproceedings",
        "li2020fedprox",
        "Li, Tian and Sahu, Anit Kumar and Zaheer, Manzil and Sanjabi, Maziar and Talwalkar, Ameet "
        "and Smith, Virginia",
        "Federated Optimization in Heterogeneous Networks",
        2020,
        **at("MLSys"),
    ),
    "reptile": paper(
        "misc",
        "nichol2018reptile",
        "Nichol, Alex and Achiam, Joshua and Schulman, John",
        "On First-Order Meta-Learning Algorithms",
        2018,
        **arxiv("1803.02999"),
    ),
    "maml": paper(
        "inproceedings",
        "finn2017maml",
        "Finn, Chelsea and Abbeel, Pieter and Levine, Sergey",
        "Model-Agnostic Meta-Learning for Fast Adaptation of Deep Networks",
        2017,
        **at("ICML"),
    ),
    "perfedavg": paper(
        "inproceedings",
        "fallah2020perfedavg",
        "Fallah, Alireza and Mokhtari, Aryan and Ozdaglar, Asuman",
        "Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic "
        "Meta-Learning Approach",
        2020,
        **at("Advances in Neural Information Processing Systems"),
    ),
    "snip": paper(
        "inproceedings",
        "lee2019snip",
        "Lee, Namhoon and Ajanthan, Thalaiyasingam and Torr, Philip H. S.",
        "SNIP: Single-Shot Network Pruning based on Connection Sensitivity",
        2019,
        **at("ICLR"),
    ),
    "scaffold": paper(
        "inproceedings",
        "karimireddy2020scaffold",
        "Karimireddy, Sai Praneeth and Kale, Satyen and Mohri, Mehryar and Reddi, Sashank "
        "and Stich, Sebastian and Suresh, Ananda Theertha",
        "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning",
        2020,
        **at("ICML"),
    ),
    "moon": paper(
        "inproceedings",
        "li2021moon",
        "Li, Qinbin and He, Bingsheng and Song, Dawn",
        "Model-Contrastive Federated Learning",
        2021,
        **at("CVPR"),
    ),
    "feddyn": paper(
        "inproceedings",
        "acar2021feddyn",
        "Acar, Durmus Alp Emre and Zhao, Yue and Matas, Ramon and Mattina, Matthew and "
        "Whatmough, Paul and Saligrama, Venkatesh",
        "Federated Learning Based on Dynamic Regularization",
        2021,
        **at("ICLR"),
    ),
    "feddc": paper(
        "inproceedings",
        "gao2022feddc",
        "Gao, Liang and Fu, Huazhu and Li, Li and Chen, Yingwen and Xu, Ming and Xu, Cheng-Zhong",
        "FedDC: Federated Learning with Non-IID Data via Local Drift Decoupling and Correction",
        2022,
        **at("CVPR"),
    ),
    "fedpa": paper(
        "inproceedings",
        "alshedivat2021fedpa",
        "Al-Shedivat, Maruan and Gillenwater, Jennifer and Xing, Eric and Rostamizadeh, Afshin",
        "Federated Learning via Posterior Averaging: A New Perspective and Practical Algorithms",
        2021,
        **at("ICLR"),
    ),
    "fedla": paper(
        "misc",
        "liu2021fedla",
        "Liu, Liangxi and others",
        "A Bayesian Federated Learning Framework with Online Laplace Approximation",
        2021,
        **arxiv("2102.01936"),
    ),
    "fedbn": paper(
        "inproceedings",
        "li2021fedbn",
        "Li, Xiaoxiao and Jiang, Meirui and Zhang, Xiaofei and Kamp, Michael and Dou, Qi",
        "FedBN: Federated Learning on Non-IID Features via Local Batch Normalization",
        2021,
        **at("ICLR"),
    ),
    "fedper": paper(
        "misc",
        "arivazhagan2019fedper",
        "Arivazhagan, Manoj Ghuhan and Aggarwal, Vinay and Singh, Aaditya Kumar and "
        "Choudhary, Sunav",
        "Federated Learning with Personalization Layers",
        2019,
        **arxiv("1912.00818"),
    ),
    "fedrep": paper(
        "inproceedings",
        "collins2021fedrep",
        "Collins, Liam and Hassani, Hamed and Mokhtari, Aryan and Shakkottai, Sanjay",
        "Exploiting Shared Representations for Personalized Federated Learning",
        2021,
        **at("ICML"),
    ),
    "lgfedavg": paper(
        "misc",
        "liang2020lgfedavg",
        "Liang, Paul Pu and Liu, Terrance and Ziyin, Liu and Allen, Nicholas B. and Auerbach, "
        "Randy P. "
        "and Brent, David and Salakhutdinov, Ruslan and Morency, Louis-Philippe",
        "Think Locally, Act Globally: Federated Learning with Local and Global Representations",
        2020,
        **arxiv("2001.01523"),
    ),
}
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
SAME_DATA = {"cifar100": "cifar10", "emnist47": "emnist", "synthetic": ""}
FLOWER = paper(
    "misc",
    "beutel2020flower",
    "Beutel, Daniel J. and others",
    "Flower: A Friendly Federated Learning Research Framework",
    2020,
    **arxiv("2007.14390"),
)
OURS: Entry = (
    "software",
    "bayflower",
    {
        "title": "{Bayflower: Bayesian Personalised Federated Learning on Flower}",
        "version": __version__,
    },
)


def entries(words: Sequence[str]) -> list[Entry]:
    """Return what to cite for methods, or for the runs in folders with a result.json."""
    found: dict[str, Entry] = {}
    for word in words:
        method, dataset = used(word)
        row = methods.get(method)
        for entry in (
            entry_of(row),
            *(DATA.get(SAME_DATA.get(name, name)) for name in dataset.split("+")),
        ):
            if entry is not None:
                found[entry[1]] = entry
        if row.stem == "metavd":  # an add-on: what it rides on is used too
            found[METHODS["reptile"][1]] = METHODS["reptile"]
    return [*found.values(), FLOWER, OURS]


def entry_of(row: methods.Method) -> Entry | None:
    """Return the entry of a method's paper: the one above, the row's own, or, of a method of
    another package, one made of its line in the table.
    """
    if row.stem in METHODS:
        return METHODS[row.stem]
    if head := re.match(r"\s*@(\w+)\{([^\s,]+),", row.bibtex):
        return head[1], head[2], {RAW: row.bibtex.strip()}
    if row.outside is None:
        return None
    title = f"{row.title}: {row.summary}" if row.summary else row.title
    return "misc", row.name, {"title": f"{{{title}}}", "note": row.paper}


def used(word: str) -> tuple[str, str]:
    """Return (method, data set) of a run's folder, or (method, "")."""
    path = Path(word)
    if word in methods.METHODS or not path.exists():
        return methods.get(word).name, ""
    path = path / "result.json" if path.is_dir() else path
    try:
        content: Any = json.loads(path.read_text())
        return str(content["method"]), str(content["dataset"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} is not the result of a run ({type(error).__name__}); give a method, or the "
            "--out of a run"
        ) from None


def bibtex(found: Sequence[Entry]) -> str:
    """Return the entries as BibTeX."""
    return "\n\n".join(
        fields[RAW]
        if RAW in fields
        else "\n".join(
            [
                f"@{kind}{{{key},",
                *(f"  {name} = {{{value}}}," for name, value in fields.items()),
                "}",
            ]
        )
        for kind, key, fields in found
    )
