"""Operations whose implementation needs to know the mesh, or is worth a file of its own."""
