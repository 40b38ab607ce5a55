"""What all tests share: no time limits inside hypothesis, because the machine may be busy with other things."""

from hypothesis import settings

settings.register_profile("kvserver", deadline=None)
settings.load_profile("kvserver")
