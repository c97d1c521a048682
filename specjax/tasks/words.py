"""Everyday words that the families share, few enough for a small vocabulary to have a token for each."""

NAMES = tuple(
    "Ada Ben Carla David Elena Farid Grace Henry Irene Jamal Keiko Liam Mara Noah Olga Pablo Rosa Sam Tina Umar Vera "
    "Wendy Yusuf Zoe Anna Boris Clara Daniel Emma Felix Greta Hugo Iris Jonas Karin Leo Mona Nina Oscar Paula".split()
)
CITIES = tuple(
    "Rome Oslo Paris Lima Cairo Tokyo Delhi Quito Madrid Berlin Dublin Athens Lisbon Vienna Prague Warsaw Boston Denver "
    "Dallas Sydney Nairobi Accra Seoul Hanoi".split()
)
COLORS = tuple("red blue green yellow black white brown purple orange grey pink silver".split())
JOBS = tuple("baker doctor teacher painter farmer pilot lawyer nurse singer writer driver tailor cook judge".split())
ANIMALS = tuple("fox owl hen dog cat horse goat duck wolf bear mouse sheep frog crow rabbit deer".split())
THINGS = tuple(
    "lamp book chair table cup hat coat box key bag ball clock bell knife plate ring rope drum boat kite mirror basket "
    "bottle candle".split()
)
FRUITS = tuple("apple pear plum grape lemon melon cherry peach mango fig banana kiwi lime date olive berry".split())
PLACES = tuple("barn river garden market forest kitchen tower bridge school harbor station meadow cave temple".split())
ADJECTIVES = tuple("old small big young quiet happy tired brave clever slow quick tall strange gentle".split())
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
