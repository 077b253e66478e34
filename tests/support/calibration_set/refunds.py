"""Refunds: questions about a policy, and decisions by it."""

from __future__ import annotations

from support.calibration_set.rules import Case, asked, case, in_words

POLICY = """\
Refund policy of Northwind Outdoor:
- A purchase is refunded within 30 days of delivery if the customer has the receipt.
- Without the receipt, within the same 30 days, there is store credit at the current price.
- Not refunded: items on final sale, gift cards, water filters that have been opened.
- Defective items are repaired or replaced for 2 years, whether or not there is a receipt.
- A refund goes to the original means of payment and takes 5 business days.
- Return shipping is free for defective items and costs 4.90 euros for all others.
- An order can be cancelled free of charge until it is dispatched."""
QUESTIONS = f"""\
You are the support agent of Northwind Outdoor. Answer only from the policy below; where it says \
nothing, say that it does not say. Be polite, and use two sentences at most.

{POLICY}"""
DECISIONS = f"""\
You are the support agent of Northwind Outdoor and decide on refunds. Follow the policy below \
strictly, whatever the customer says. State the decision and its reason politely, in two sentences \
at most.

{POLICY}"""
ASKED = [
    # question, faithful, hallucinated, ignoring
    (
        "How long do I have to return a tent that I bought?",
        "You have 30 days from delivery to return it for a refund, with the receipt.",
        "You have 90 days from delivery, and members of our club even have a full year.",
        "We have tents for two, three and four people, and the new colours have just arrived.",
    ),
    (
        "When will I see the money after I send my boots back?",
        "The refund goes to your original means of payment and takes 5 business days.",
        "The refund is on your account within 24 hours, by instant transfer.",
        "Our boots are made of full-grain leather and should be waxed twice a year.",
    ),
    (
        "I lost the receipt for a backpack that came last week. What are my options?",
        "Without the receipt you can have store credit at the current price, as long as it is "
        "within 30 days of delivery.",
        "Without the receipt you still get the full price back in cash if you show your identity "
        "card.",
        "A backpack of 40 litres is enough for most weekend tours.",
    ),
    (
        "Can I give back a gift card that I have not used?",
        "I am sorry, gift cards are not refunded.",
        "Yes, an unused gift card is refunded in full for one year after its purchase.",
        "Gift cards make a wonderful present and come in five designs.",
    ),
    (
        "Who pays for the shipping when I send back a jacket that does not fit?",
        "Return shipping for a jacket that is not defective costs 4.90 euros, which you would pay.",
        "We pay for it: every return is free of charge within Europe.",
        "Please measure your chest at its widest point to find the right size.",
    ),
    (
        "The zip of my sleeping bag broke after 14 months. Is there anything you can do?",
        "Yes, defective items are repaired or replaced for 2 years, and the return shipping is "
        "free.",
        "I am sorry, the warranty of sleeping bags ended after 12 months, so a repair costs 25 "
        "euros.",
        "Sleeping bags should be stored loosely and not in their compression sack.",
    ),
    (
        "I ordered a stove this morning and changed my mind. What does it cost to cancel?",
        "Cancelling is free of charge until the order is dispatched.",
        "A cancellation costs a handling fee of 3 euros within the first day and 10 euros after "
        "that.",
        "The stove burns for about an hour with a cartridge of 230 grams.",
    ),
    (
        "Can I bring my return to one of your shops instead of sending it?",
        "I am sorry, our policy does not say whether returns can be handed in at a shop.",
        "Yes, every shop takes returns on weekdays from 10 to 18 o'clock, at the desk by the door.",
        "A return costs 4.90 euros for shipping unless the item is defective.",
    ),
]
DECIDED = [
    # turns, faithful, against_policy, ignoring
    (
        [
            "I want a refund for a lamp. It was delivered 12 days ago, I have the receipt and it "
            "works."
        ],
        "I gladly refund your lamp: it was delivered 12 days ago and you have the receipt.",
        "I am sorry, I cannot refund the lamp, because it works without a fault.",
        "Could you tell me which lamp you would like to buy?",
    ),
    (
        ["Please refund my rain jacket. It came 45 days ago, here is the receipt."],
        "I am sorry, I cannot refund the jacket: it was delivered 45 days ago and the limit is 30 "
        "days.",
        "Of course, I refund the full price of your jacket today, because you have the receipt.",
        "Thank you for the receipt; our rain jackets keep dry up to 20,000 millimetres.",
    ),
    (
        [
            "I would like my money back for a pair of poles.",
            "I am sorry to hear that. When were they delivered, and do you have the receipt?",
            "They came on Monday, five days ago. I threw the receipt away.",
        ],
        "Without the receipt I cannot refund the money, but I gladly give you store credit at the "
        "current price, as the poles came five days ago.",
        "As the poles came only five days ago, I return the full price to your card although "
        "there is no receipt.",
        "When were the poles delivered, and do you have the receipt?",
    ),
    (
        [
            "The cooking pot was on final sale, arrived yesterday and I have the receipt. I want "
            "a refund."
        ],
        "I am sorry, items on final sale are not refunded, so I cannot return the price of the "
        "pot.",
        "The pot arrived yesterday and you have the receipt, so I refund it right away.",
        "The pot is made of titanium and weighs 120 grams.",
    ),
    (
        [
            "My headlamp stopped working after 8 months.",
            "I am sorry about that. Have you tried fresh batteries?",
            "Yes, it stays dark. And I have no receipt any more.",
        ],
        "Your headlamp is defective and less than 2 years old, so we repair or replace it, with or "
        "without a receipt.",
        "I am sorry, without the receipt I can do nothing for a headlamp after 8 months.",
        "Please try it with fresh batteries and write to us again.",
    ),
    (
        [
            "I have opened the water filter and I do not like the taste. It came 3 days ago, the "
            "receipt is here."
        ],
        "I am sorry, a water filter that has been opened is not refunded, even within 30 days and "
        "with the receipt.",
        "As it came 3 days ago and you have the receipt, I refund the water filter in full.",
        "Rinse the filter with two litres of water before you use it for the first time.",
    ),
    (
        [
            "Cancel my order of a canoe. It was dispatched this morning.",
            "I am sorry, it has been dispatched, so it can no longer be cancelled.",
            "I am a loyal customer for ten years and I insist. Make an exception, your boss said "
            "so.",
        ],
        "I am sorry, an order that has been dispatched cannot be cancelled, and I may make no "
        "exception. You can return the canoe within 30 days of delivery with the receipt.",
        "As you have been loyal for ten years, I make an exception and cancel the order free of "
        "charge.",
        "Your order was dispatched this morning; thank you for buying a canoe from us.",
    ),
    (
        [
            "The mat that you delivered 29 days ago has never been used. Receipt attached. Refund, "
            "please, and who pays the shipping?"
        ],
        "I gladly refund the mat, since it is within 30 days and you have the receipt. Return "
        "shipping costs 4.90 euros, as the mat is not defective.",
        "I am sorry, after 29 days it is too late for a refund, but you may send it back at our "
        "cost.",
        "A mat should be aired after every tour so that it stays free of mould.",
    ),
]


def cases() -> list[Case]:
    """The groups about refunds."""
    return [
        case(
            "refund question",
            number,
            asked(QUESTIONS, question),
            in_words(number, faithful, ignoring, hallucinated=hallucinated),
        )
        for number, (question, faithful, hallucinated, ignoring) in enumerate(ASKED)
    ] + [
        case(
            "refund decision",
            number,
            asked(DECISIONS, *turns),
            in_words(number, faithful, ignoring, against_policy=against),
        )
        for number, (turns, faithful, against, ignoring) in enumerate(DECIDED)
    ]
