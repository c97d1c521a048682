"""Words by what they are about: everyday ones of one theme, and rare ones of fields that have little in common."""

THEMES = tuple(
    tuple(line.split())
    for line in (
        "kitchen soup spoon boil onion salt plate hungry",
        "garden flower seed dig rain soil spring green",
        "train ticket station late seat window travel bag",
        "school teacher pupil chalk lesson write desk learn",
        "doctor fever bed nurse pill sleep better cough",
        "snow winter sled cold hill mitten slide fun",
        "farm cow milk barn hay morning feed calf",
        "beach wave shell swim sand towel sunny shore",
        "book library read quiet shelf borrow page story",
        "guitar song sing stage band loud crowd dance",
        "boat river fish net row calm catch bank",
        "bread oven flour bake warm butter slice smell",
        "tent forest fire night hike map owl path",
        "paint brush canvas color wall draw artist picture",
        "letter stamp post envelope send friend far answer",
        "football goal team kick coach grass win referee",
    )
)
"""Eight common words for each everyday theme."""

FIELDS = tuple(
    tuple(line.split())
    for line in (
        "isotope catalyst enzyme polymer electron alloy solvent titration",
        "fresco palette mosaic etching portrait pigment easel engraving",
        "verdict subpoena tribunal clause plaintiff alibi bailiff statute",
        "glacier basalt geyser tundra canyon lagoon sediment volcano",
        "cello fugue overture tenor metronome ballad octave chorus",
        "compiler cache packet binary firewall kernel debugger router",
        "dividend ledger tariff inflation mortgage broker invoice bankrupt",
        "helmet catapult rampart trebuchet dungeon armor lance moat",
        "galaxy comet eclipse orbit quasar telescope asteroid meteor",
        "saffron truffle marinade oregano caramel brioche vinegar nutmeg",
        "walrus gecko ostrich beetle jellyfish badger heron lynx",
        "paradox syllogism virtue nihilism axiom dialectic ethics skeptic",
        "anvil lathe chisel rivet pulley welder gasket crowbar",
        "rudder keel schooner anchor compass lighthouse harpoon galley",
    )
)
"""Eight rare words for each field."""
