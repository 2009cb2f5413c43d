"""Adapters: one package per framework, installed as deepytorch.integrations.

README.md beside this file is their contract.
"""
