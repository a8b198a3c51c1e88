"""The tasks that come with the package: a row each, with the options of a `ProbeTask`."""

from typing import Any

# What MMLU calls humanities; the Hub's copy has the subjects alone.
HUMANITIES = [
    "formal_logic",
    "high_school_european_history",
    "high_school_us_history",
    "high_school_world_history",
    "international_law",
    "jurisprudence",
    "logical_fallacies",
    "moral_disputes",
    "moral_scenarios",
    "philosophy",
    "prehistory",
    "professional_law",
    "world_religions",
]

CATALOGUE: dict[str, dict[str, Any]] = {
    "banking77": {
        "source": "mteb/banking77",
        "label": "label_text",
        "local": "banking77/{split}.parquet",
        "description": "Intents of questions to a bank (Casanueva et al. 2020).",
    },
    "ag_news": {
        "source": "fancyzhx/ag_news",
        "num_train": 10_000,
        "classes": ("World", "Sports", "Business", "Sci/Tech"),
        "local": "ag_news/{split}.parquet",
        "description": "Topics of news (Zhang, Zhao, LeCun 2015).",
    },
    "tweet_sentiment": {
        "source": "mteb/tweet_sentiment_extraction",
        "label": "label_text",
        "where": {"label_text": ["negative", "positive"]},
        "classes": ("negative", "positive"),
        "test": None,
        "num_train": 10_223,
        "num_test": 4_382,
        "drop_empty": True,
        "local": "tweet_sentiment/{split}.parquet",
        "description": "Sentiment of tweets. The paper names two classes and 14,605 rows cut 70/30, but no corpus: the "
        "rows, from the training split of tweet_sentiment_extraction without its neutral ones, are ours.",
    },
    "tweet_sentiment_extraction": {
        "source": "mteb/tweet_sentiment_extraction",
        "label": "label_text",
        "classes": ("negative", "neutral", "positive"),
        "drop_empty": True,
        "local": "tweet_sentiment/{split}.parquet",
        "description": "Sentiment of tweets (Kaggle 2020, as in MTEB); one training row has no text.",
    },
    "sst2": {
        "source": "nyu-mll/glue:sst2",
        "text": "sentence",
        "test": "validation",
        "classes": ("negative", "positive"),
        "local": "glue/sst2_{split}.parquet",
        "description": "Sentiment of phrases from film reviews (Socher et al. 2013). GLUE keeps the labels of its test "
        "split, so its validation split is the test here.",
    },
    "emotion": {
        "source": "dair-ai/emotion:split",
        "validation": "validation",
        "classes": ("sadness", "joy", "love", "anger", "fear", "surprise"),
        "local": "emotion/{split}.parquet",
        "description": "Emotions of tweets (Saravia et al. 2018).",
    },
    "trec": {
        "source": "SetFit/TREC-QC",
        "label": "label_coarse_original",
        "classes": ("ABBR", "DESC", "ENTY", "HUM", "LOC", "NUM"),
        "description": "What a question asks for (Li, Roth 2002).",
    },
    "yelp": {
        "source": "Yelp/yelp_review_full",
        "kind": "regression",
        "test": None,
        "label_offset": 1.0,
        "balance": 2_000,
        "local": "yelp_reviews/{split}.parquet",
        "local_options": {"train": ["validation", "test"]},
        "description": "Stars of reviews, 1 to 5 (Zhang, Zhao, LeCun 2015); 2,000 of each, cut 70/30.",
    },
    "mmlu_humanities": {
        "source": "cais/mmlu:all",
        "text": "question: {question} answer: A. {choices[0]}, B. {choices[1]}, C. {choices[2]}, D. {choices[3]}",
        "label": "answer",
        "train": "test",
        "test": None,
        "where": {"subject": HUMANITIES},
        "classes": ("A", "B", "C", "D"),
        "local": "benchmarks/mmlu_{split}.parquet",
        "local_options": {"label": "label"},
        "description": "The right one of four answers (Hendrycks et al. 2021). MMLU has no training split: its test "
        "split is cut 70/30, which is ours, as the paper does not say how many rows it used.",
    },
    "imdb": {
        "source": "stanfordnlp/imdb",
        "classes": ("neg", "pos"),
        "local": "imdb/{split}.parquet",
        "description": "Sentiment of film reviews (Maas et al. 2011).",
    },
    "twenty_newsgroups": {
        "source": "SetFit/20_newsgroups",
        "label": "label_text",
        "drop_empty": True,
        "local": "twenty_newsgroups/{split}.parquet",
        "description": "Groups of Usenet posts (Lang 1995), parted by date. The Hub's copy is without quotations and "
        "signatures; a local copy may have them.",
    },
    "cola": {
        "source": "nyu-mll/glue:cola",
        "text": "sentence",
        "test": "validation",
        "classes": ("unacceptable", "acceptable"),
        "local": "glue/cola_{split}.parquet",
        "description": "Whether a sentence is grammatical (Warstadt et al. 2019); the test is GLUE's validation split.",
    },
    "tweeteval_emotion": {
        "source": "cardiffnlp/tweet_eval:emotion",
        "validation": "validation",
        "classes": ("anger", "joy", "optimism", "sadness"),
        "local": "tweeteval/emotion_{split}.parquet",
        "description": "Emotions of tweets (Barbieri et al. 2020).",
    },
    "tweeteval_irony": {
        "source": "cardiffnlp/tweet_eval:irony",
        "validation": "validation",
        "classes": ("non_irony", "irony"),
        "local": "tweeteval/irony_{split}.parquet",
        "description": "Irony of tweets (Barbieri et al. 2020).",
    },
}
