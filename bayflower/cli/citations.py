"""The papers of methods, as entries of BibTeX; those of data sets are in `sources.py`."""

from __future__ import annotations

# stem of the method → (kind, key, fields)
Entry = tuple[str, str, dict[str, str]]


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
    "ditto": paper(
        "inproceedings",
        "li2021ditto",
        "Li, Tian and Hu, Shengyuan and Beirami, Ahmad and Smith, Virginia",
        "Ditto: Fair and Robust Federated Learning Through Personalization",
        2021,
        **at("ICML"),
    ),
    "fedproto": paper(
        "inproceedings",
        "tan2022fedproto",
        "Tan, Yue and Long, Guodong and Liu, Lu and Zhou, Tianyi and Lu, Qinghua and Jiang, Jing "
        "and Zhang, Chengqi",
        "FedProto: Federated Prototype Learning across Heterogeneous Clients",
        2022,
        **at("AAAI"),
    ),
    "fedrod": paper(
        "inproceedings",
        "chen2022fedrod",
        "Chen, Hong-You and Chao, Wei-Lun",
        "On Bridging Generic and Personalized Federated Learning for Image Classification",
        2022,
        **at("ICLR"),
    ),
    "pfedbayes": paper(
        "inproceedings",
        "zhang2022pfedbayes",
        "Zhang, Xu and Li, Yinchuan and Li, Wenpeng and Guo, Kaiyang and Shao, Yunfeng",
        "Personalized Federated Learning via Variational Bayesian Inference",
        2022,
        **at("ICML"),
    ),
    "pvi": paper(
        "misc",
        "ashman2022pvi",
        "Ashman, Matthew and Bui, Thang D. and Nguyen, Cuong V. and Markou, Stratis and Weller, "
        "Adrian and Swaroop, Siddharth and Turner, Richard E.",
        "Partitioned Variational Inference: A Framework for Probabilistic Federated Learning",
        2022,
        **arxiv("2202.12275"),
    ),
    "fedep": paper(
        "inproceedings",
        "guo2023fedep",
        "Guo, Han and Greengard, Philip and Wang, Hongyi and Gelman, Andrew and Kim, Yoon and "
        "Xing, Eric P.",
        "Federated Learning as Variational Inference: A Scalable Expectation Propagation Approach",
        2023,
        **at("ICLR"),
    ),
    "fedpac": paper(
        "inproceedings",
        "xu2023fedpac",
        "Xu, Jian and Tong, Xinyi and Huang, Shao-Lun",
        "Personalized Federated Learning with Feature Alignment and Classifier Collaboration",
        2023,
        **at("ICLR"),
    ),
    "pfedbred": paper(
        "inproceedings",
        "shi2023pfedbred",
        "Shi, Mingjia and Zhou, Yuhao and Wang, Kai and Zhang, Huaizheng and Huang, Shudong and "
        "Ye, Qing and Lv, Jiancheng",
        "PRIOR: Personalized Prior for Reactivating the Information Overlooked in Federated "
        "Learning",
        2023,
        **at("NeurIPS"),
    ),
    "fedbe": paper(
        "inproceedings",
        "chen2021fedbe",
        "Chen, Hong-You and Chao, Wei-Lun",
        "{FedBE}: Making {Bayesian} Model Ensemble Applicable to Federated Learning",
        2021,
        **at("ICLR"),
    ),
    "fedala": paper(
        "inproceedings",
        "zhang2023fedala",
        "Zhang, Jianqing and Hua, Yang and Wang, Hao and Song, Tao and Xue, Zhengui and Ma, Ruhui "
        "and Guan, Haibing",
        "{FedALA}: Adaptive Local Aggregation for Personalized Federated Learning",
        2023,
        **at("AAAI"),
    ),
    "fedpop": paper(
        "inproceedings",
        "kotelevskii2022fedpop",
        "Kotelevskii, Nikita and Vono, Maxime and Durmus, Alain and Moulines, Eric",
        "{FedPop}: A {Bayesian} Approach for Personalised Federated Learning",
        2022,
        **at("NeurIPS"),
    ),
    "gpfl": paper(
        "inproceedings",
        "zhang2023gpfl",
        "Zhang, Jianqing and Hua, Yang and Wang, Hao and Song, Tao and Xue, Zhengui and Ma, Ruhui "
        "and Cao, Jian and Guan, Haibing",
        "{GPFL}: Simultaneously Learning Global and Personalized Feature Information for "
        "Personalized Federated Learning",
        2023,
        **at("ICCV"),
    ),
    "pfedgp": paper(
        "inproceedings",
        "achituve2021pfedgp",
        "Achituve, Idan and Shamsian, Aviv and Navon, Aviv and Chechik, Gal and Fetaya, Ethan",
        "Personalized Federated Learning with {G}aussian Processes",
        2021,
        **at("NeurIPS"),
    ),
    "fedcp": paper(
        "inproceedings",
        "zhang2023fedcp",
        "Zhang, Jianqing and Hua, Yang and Wang, Hao and Song, Tao and Xue, Zhengui and Ma, Ruhui "
        "and Guan, Haibing",
        "{FedCP}: Separating Feature Information for Personalized Federated Learning via "
        "Conditional Policy",
        2023,
        **at("KDD"),
    ),
    "fedivon": paper(
        "misc",
        "pal2024fedivon",
        "Pal, Shivam and Gupta, Aishwarya and Sarwar, Saqib and Rai, Piyush",
        "Federated Learning with Uncertainty and Personalization via Efficient Second-order "
        "Optimization",
        2024,
        **arxiv("2411.18385"),
    ),
    "qlsd": paper(
        "inproceedings",
        "vono2022qlsd",
        "Vono, Maxime and Plassier, Vincent and Durmus, Alain and Dieuleveut, Aymeric and "
        "Moulines, Eric",
        "{QLSD}: Quantised {Langevin} Stochastic Dynamics for {Bayesian} Federated Learning",
        2022,
        **at("AISTATS"),
    ),
}
