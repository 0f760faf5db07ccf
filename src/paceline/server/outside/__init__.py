"""Those outside a run: they read its weights, watch it, leave samples for it, or bring what they have learnt.

outsider   what `paceline.connect` gives, with `desks`: a `line` to each
follower   from version to version; `changes`: only what changed; `bodies`: weights as they are held
desk       the run's side: one at every server; what both sides say is in `visits`
copies     weights of one version, for readers
watching   how the run stands
inbox      samples that were left; `taking`: how members get them; `samples`: as bytes
lobby      where guests call, by `calling`; what both sides say is in `calls`
offers     what guests have brought for the next round; `shelf`: weights for them
"""
