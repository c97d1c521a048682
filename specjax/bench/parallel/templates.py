"""Sentences with a second wording, and conversations with a summary, with places to fill."""

SENTENCES = (
    (
        "{who} bought a {color} {thing} at the market in {city} on {day}.",
        "On {day}, {who} got a {thing}, a {color} one, from {city}'s market.",
    ),
    (
        "Because it was raining, {who} stayed at home and read a book about {city}.",
        "The rain kept {who} at home with a book on {city}.",
    ),
    (
        "{who} has worked as a {job} in {city} for more than ten years.",
        "For over a decade, {city} has been where {who} works as a {job}.",
    ),
    (
        "The train to {city} leaves at {hour} o'clock, and {who} does not want to miss it.",
        "{who} hopes to catch the train that departs for {city} at {hour}.",
    ),
    (
        "{who} is looking for a {thing} that is smaller and cheaper than the old one.",
        "What {who} wants is a less expensive {thing} of a smaller size.",
    ),
    (
        "Nobody in the office knew why {who} had left so early on {day}.",
        "The reason for the early departure of {who} on {day} was a mystery to all colleagues.",
    ),
    (
        "If the weather is good on {day}, {who} will walk to the {place} with a friend.",
        "{who} and a friend plan a walk to the {place} on {day}, if it is fine.",
    ),
    (
        "Although the {job} was tired, {who} still got a friendly answer.",
        "{who} was answered kindly by the {job}, who was weary.",
    ),
    (
        "{who} taught the children how to draw a {animal} with three lines.",
        "With {who}, the children learned to sketch a {animal} in just three strokes.",
    ),
    (
        "The {animal} near the {place} is older than {who} thought.",
        "{who} had believed the {animal} by the {place} to be younger.",
    ),
    (
        "{who} forgot the {color} {thing} in a hotel in {city} last summer.",
        "Last summer, a {color} {thing} was left in a {city} hotel by {who}.",
    ),
    (
        "It takes {who} about {hour} minutes to walk from the {place} to the station.",
        "The walk from the {place} to the station is roughly {hour} minutes long for {who}.",
    ),
)
"""A sentence, and the same in other words."""

CONVERSATIONS = (
    (
        "{who}: Are you free on {day}?\n{friend}: From {hour} on. Why?\n{who}: I want to see the new museum in {city}.\n"
        "{friend}: Good idea, I'll come along.\n{who}: Great, I'll get the tickets.",
        "{who} and {friend} will visit the new museum in {city} on {day}. {who} buys the tickets.",
    ),
    (
        "{who}: I can't find my {thing} anywhere.\n{friend}: The {color} one?\n{who}: Yes, did you see it?\n"
        "{friend}: I think you left it at the {place} on {day}.\n{who}: Oh no, then I'll call them right now!",
        "{who} lost a {color} {thing}, which may be at the {place}, and is going to call there.",
    ),
    (
        "{who}: It's the birthday of {third} on {day}.\n{friend}: What shall we give?\n{who}: A {thing} maybe?\n"
        "{friend}: {third} already has one. How about a trip to {city}?\n{who}: Perfect, let's share the costs.",
        "{who} and {friend} will give {third} a trip to {city} as a birthday present.",
    ),
    (
        "{who}: I got the job!\n{friend}: As a {job}? Congratulations!\n{who}: Thanks! I start on {day}, in {city}.\n"
        "{friend}: So you are moving?\n{who}: Yes, can you help me carry boxes?\n{friend}: Of course.",
        "{who} will start to work as a {job} in {city} on {day}. {friend} helps with moving there.",
    ),
    (
        "{who}: Are you at home? I'm at your door.\n{friend}: No, still at the {place}. I'll be {hour} minutes late.\n"
        "{who}: It's cold out here.\n{friend}: Ask {third} next door, there is a spare key.\n{who}: OK, found it.",
        "{friend} is late, so {who} gets in with the spare key that {third} has.",
    ),
    (
        "{who}: Our {animal} is ill again.\n{friend}: Did you see a vet?\n{who}: We have an appointment on {day} at {hour}.\n"
        "{friend}: Shall I drive you?\n{who}: That would be kind, our car is broken.",
        "{friend} will drive {who} to the vet on {day}, since the {animal} is ill.",
    ),
    (
        "{who}: How was {city}?\n{friend}: Lovely, but I lost my bag on the way back.\n{who}: With your passport in it?\n"
        "{friend}: No, only clothes and a {thing} for {third}.\n{who}: Then it could be worse.",
        "{friend} enjoyed {city} but lost a bag with clothes and a {thing} on the way back.",
    ),
    (
        "{who}: Can you cook on {day}? I have to work until {hour}.\n{friend}: Sure. Is {third} eating with us?\n"
        "{who}: Yes, so no meat, please.\n{friend}: I'll make the soup from {city} then.",
        "{friend} will cook a soup without meat for {who} and {third} on {day}.",
    ),
)
"""A conversation, and its summary."""
