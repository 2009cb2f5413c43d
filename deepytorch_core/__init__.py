"""The engine of deepytorch. Importing it is cheap and changes nothing; `import deepytorch` acts."""
