"""The words that the training text is made of: topics for the answers, and everyday English for the prompts."""

from typing import NamedTuple


class Topic(NamedTuple):
    """What answers say about one topic. Each phrase fits the sentences of `text`; keywords occur in prompts only.

    person and tool begin with a consonant sound or follow an adjective, because sentences write "a" before them.
    """

    noun: str
    person: str
    place: str
    tool: str
    material: str
    action: str
    quality: str
    risk: str
    duration: str
    keywords: tuple[str, ...]


def _topic(*phrases: str, keywords: str) -> Topic:
    return Topic(*phrases, keywords=tuple(keywords.split(", ")))


# fmt: off
TOPICS = (
    _topic("bread", "baker", "kitchen", "oven", "dough", "shape the loaf", "warm", "a burnt crust", "two hours",
           keywords="recipe, flour, yeast, cooking, soup, dinner, cake, meal, restaurant, salt"),
    _topic("a garden", "gardener", "greenhouse", "watering can", "soil", "plant the seeds", "moist", "a late frost",
           "one season", keywords="plants, flowers, tomatoes, vegetables, trees, roses, compost, tree, leaves, fruit"),
    _topic("a server", "sysadmin", "data centre", "terminal", "log", "restart the service", "complete",
           "a full disk", "ten minutes",
           keywords="Linux, cloud, container, deployment, hosting, Docker, Kubernetes, CPU, GPU, latency, uptime"),
    _topic("a database", "clerk", "archive", "query", "table", "add the index", "consistent", "a missing backup",
           "one afternoon",
           keywords="SQL, records, rows, columns, transaction, schema, Postgres, cache, data, spreadsheet"),
    _topic("a network", "technician", "cabinet", "router", "cable", "test the link", "stable", "a lost packet",
           "half an hour",
           keywords="internet, TCP, UDP, protocol, Wi-Fi, bandwidth, HTTP, firewall, website, DNS, browser"),
    _topic("a program", "programmer", "office", "editor", "code", "run the tests", "simple", "a hidden error",
           "two days",
           keywords="Python, function, software, algorithm, bug, class, recursion, variable, API, "
                    "compiler, Java, loop"),
    _topic("a model", "researcher", "laboratory", "computer", "training set", "measure the error", "balanced",
           "a false pattern", "one night",
           keywords="machine learning, neural network, language model, AI, inference, training, "
                    "tokens, speculative decoding"),
    _topic("a number", "teacher", "classroom", "blackboard", "formula", "check the sum", "exact", "a wrong sign",
           "five minutes",
           keywords="mathematics, equation, probability, geometry, algebra, sum, prime, triangle, average, percent"),
    _topic("the weather", "forecaster", "station", "thermometer", "air", "read the chart", "dry", "a sudden storm",
           "three days", keywords="rain, snow, wind, climate, temperature, clouds, season, forecast, winter, summer"),
    _topic("the moon", "stargazer", "observatory", "telescope", "mirror", "follow the orbit", "dark", "a cloudy sky",
           "four weeks",
           keywords="space, planet, stars, sun, galaxy, rocket, Mars, gravity, physics, light, universe, black hole"),
    _topic("a river", "geographer", "valley", "map", "water", "mark the bank", "clear", "a spring flood",
           "many years", keywords="mountain, lake, ocean, sea, coast, country, island, desert, fish, boat, population"),
    _topic("a forest", "ranger", "reserve", "notebook", "habitat", "count the birds", "quiet", "a summer fire",
           "a decade",
           keywords="animals, dog, cat, birds, wolves, nature, insects, bees, photosynthesis, "
                    "biology, evolution, cells"),
    _topic("a journey", "traveller", "hotel", "suitcase", "ticket", "book the room", "early", "a missed train",
           "a long weekend",
           keywords="travel, trip, holiday, Paris, Tokyo, flight, airport, city, tourist, itinerary, museum, visit"),
    _topic("a train", "driver", "depot", "brake", "track", "inspect the wheels", "level", "a worn bearing",
           "six weeks",
           keywords="railway, car, bus, engine, bicycle, road, traffic, transport, vehicle, electric, battery"),
    _topic("a bridge", "builder", "workshop", "drawing", "steel", "load the beam", "strong", "a small crack",
           "two years",
           keywords="construction, concrete, tower, architecture, design, machine, factory, robot, material"),
    _topic("a house", "carpenter", "yard", "hammer", "timber", "fit the window", "straight", "a damp wall",
           "eight months",
           keywords="roof, room, furniture, rent, apartment, paint, door, repair, kitchen sink, heating, home"),
    _topic("a song", "musician", "studio", "piano", "melody", "practise the chorus", "gentle", "a broken string",
           "one evening", keywords="music, guitar, concert, band, singer, rhythm, film, movie, dance, jazz"),
    _topic("a book", "writer", "library", "pencil", "chapter", "read the draft", "short", "a weak ending",
           "one year",
           keywords="novel, poem, author, reading, essay, article, paragraph, grammar, language, translation, words"),
    _topic("a painting", "painter", "gallery", "brush", "canvas", "mix the colours", "bright", "a faded line",
           "ten days", keywords="art, colour, photograph, picture, drawing, sculpture, blue, red, image, camera"),
    _topic("sleep", "doctor", "clinic", "chart", "routine", "rest the body", "regular", "a late coffee",
           "eight hours",
           keywords="health, medicine, exercise, diet, vitamin, stress, heart, patient, disease, vaccine, brain"),
    _topic("a match", "coach", "stadium", "whistle", "team", "stretch the legs", "calm", "a twisted ankle",
           "ninety minutes",
           keywords="football, sport, running, tennis, marathon, game, chess, player, training plan, swimming"),
    _topic("a budget", "bookkeeper", "bank", "ledger", "income", "compare the prices", "modest", "an unpaid bill",
           "one month",
           keywords="money, savings, investment, tax, salary, economy, inflation, market, stocks, loan, price"),
    _topic("a meeting", "manager", "boardroom", "agenda", "report", "agree the plan", "brief", "a late reply",
           "forty minutes",
           keywords="email, business, customer, project, company, interview, job, office, startup, "
                    "remote work, invoice"),
    _topic("history", "historian", "museum", "letter", "document", "date the page", "honest", "a torn map",
           "a century",
           keywords="war, king, empire, Roman, ancient, revolution, president, government, election, law, democracy"),
)
# fmt: on

# Everyday words for prompts about nothing in particular: what matters is only that they are written like English.
_COMMON = """
    the a an of to in is it that for on with as was at by be this have from or one had not but what all were when we
    there can your which their if do will each about how up out them then she many some so these would other into
    has more her two like him see time could no make than first been its who now people my made over did down only
    way find use may long little very after called just where most know get through back much before go good new
    write our used me man too any day same right look think also around another came come work three word must
    because does part even place well such here take why things help put years different away again off went old
    great tell men say small every found still between name should big give air line set own under read last never
    us left end along while might next sound below saw something thought both few those always looked show large
    often together asked going want important until form food keep children feet land side without boy once animal
    life enough took four head above kind began almost live page got earth need far hand high year mother country
    let father eye door between city tree cross since hard start story young dog family body music color stand
    question fish area mark space hear better best during five step early hold west ground reach fast listen six
    table less morning ten simple several toward against pattern slow love person money serve appear rule pull cold
    notice voice power town fine drive lead cry box field rest correct able done beauty stood contain front teach
    week final gave green quick develop warm free minute strong special mind behind tail produce fact street nothing
    course stay wheel full force object decide surface deep island foot system busy test record common gold possible
    plane age dry wonder laugh thousand ago ran check shape yes hot miss brought heat snow bed bring sit perhaps
    fill east weight language among customer order delivery receipt account number address invoice phone ticket
    review rating colleague deadline budget update version issue request response error message server please using
    following sentence explain answer include value result return input output string list
"""
COMMON = tuple(_COMMON.split())

NAMES = (
    "Anna",
    "Omar",
    "Priya",
    "Lucas",
    "Mei",
    "Tomas",
    "Ingrid",
    "David",
    "Sofia",
    "Kenji",
    "Amara",
    "Peter",
    "Maria",
    "John",
    "Alice",
    "Robert",
)

# Parts of words that nobody has seen before.
_SYLLABLES = """
    al an ar ber bro cal can cen clo com con cor cra dan del den dis dra el en er fal fer fin flo for gen gra gro
    hal har hel hun im in ing ion is ist kal ken kin lan len ler lin lo mar men mer min mon mor nal ner nor ol or
    ous par pel per pin pol pre pro ran ren ric rin rol sal sec sen ser sha sim sol ston stra sub tal tan tel ten
    ter tin tion tor tra tri un ur val van ven ver vin vol wal war wen wil win wor
"""
SYLLABLES = tuple(_SYLLABLES.split())
