"""Headway's version, once: setup.cfg, `headway --version` and config.json read it here."""

VERSION = "0.1.0"
