from torch import nn


class Classifier(nn.Module):
    def __init__(self, vocab=40, width=24, topics=4):
        super().__init__()
        self.bag = nn.EmbeddingBag(vocab, width)
        self.head = nn.Sequential(nn.Linear(width, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, topics))

    def forward(self, words):
        return self.head(self.bag(words))
