"""The build stage: checkpoint -> traced graph -> passes -> target -> engine directory."""
