import jaxft


def digits(completion):
    return sum(character.isdigit() for character in completion) / 8


prompts = [f"number {i}?" for i in range(16)]
result = jaxft.train("qwen3-50k", digits, prompts, num_epochs=25, learning_rate=1e-2, max_completion_length=8)
print(result, "- see", result.plot().path)
