"""The device side of the engine: state that stays there, plans that go there, compiled steps. The only user of jit."""
