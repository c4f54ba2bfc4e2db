// Package decoder runs language models: it reads a model's folder, and continues texts.
//
//	model, err := decoder.Open("SmolLM2-135M-Instruct")
//	...
//	defer model.Close()
//	engine, err := model.Engine(decoder.Options{})
//	...
//	defer engine.Close()
//	prompt, err := model.Tokenizer().Encode("Once upon a time", tokenizer.Options{})
//	...
//	text, err := engine.Start(ctx, decoder.Request{Prompt: prompt, Tokens: 100})
//	...
//	for token, err := range text.Tokens() {
//		...
//		fmt.Print(token.Text)
//	}
//
// # Engine
//
// An [Engine] has the weights of a model, a cache for keys and values, and graphs for steps of several sizes. Its scheduler
// continues any number of texts at a time:
//
//   - Texts join and leave at any step. Prompts are read in chunks, beside the single tokens of other texts.
//   - A text that begins as another one did shares the keys and values of that beginning. So n texts of one prompt read it once.
//   - A full cache makes the youngest text wait, of those with the highest number of [Request].Priority. Its tokens are computed again later,
//     or read from a file of [Options].Swap.
//   - [Engine.Pin] keeps the beginning of texts in the cache.
//   - A text ends by a token of the model, by a text of [Request].Stop, at a number of tokens, or with its context, which may have a deadline.
//   - A text has no special tokens. With [Request].Special, a text has their names, and the name of the token that ends the text.
//   - [Request].Cut shortens prompts that are too long. With [Request].Shift, a text goes on when its context is full.
//   - [Engine.Save] keeps a beginning in a file, and [Engine.Load] reads it for later texts.
//   - With [Request].Constraint, a text is in a language: JSON of a schema, by package jsonschema.
//   - With [Request].Draft, a text guesses its next tokens from its own repetitions, and a step checks several guesses.
//
// # Choice of tokens
//
// [Sampling] says how tokens are chosen: the most likely one, or a random one by temperature, top-k, top-p, min-p and typical-p.
// Penalties, a bias and forbidden tokens change the logits first. [Model.Sampling] returns what the model's
// generation_config.json, or the keys general.sampling.* of a GGUF file, say. A text depends on its [Request] alone: not on texts beside it, and not on guesses.
//
// # Adapters
//
// [Model.Adapt] merges a LoRA adapter into the weights: a folder of peft, or a GGUF file. [Open] merges an adapter that lies beside
// the weights. An adapter that cannot be merged as a whole is an error.
//
// # Weights of few bits
//
// Matrices have 8 or fewer bits from these sources:
//
//	a GGUF file                Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K, Q6_K; on CPUs in the mapped file. On a
//	                           GPU, numbers of 5 and 6 bits take a byte each
//	a folder by GPTQ           bits 4; bits 8 with sym; group_size -1 or a multiple of 32; with and without desc_act; checkpoint_format
//	                           gptq and gptq_v2
//	a folder by AWQ            bits 4; version gemm with zero_point; group_size -1 or a multiple of 32
//	a folder in FP8            E4M3: quant_method fp8, with one scale for a matrix, or weight_block_size [128 128]; quant_method
//	                           compressed-tensors, of format float-quantized, with strategy tensor, channel or block
//	[Options].Weights          rounds matrices of any source to nn.Int4, tensor.Int8 or leanattention.E4M3: see nn.Rounded
//
// quantization_config of config.json says how a folder is quantised. A field or a value that is not known is [ErrUnsupported]. Numbers,
// scales and zeros stay those of the folder: a scale of integers that no float16 has is an error. Scales of activations have no effect:
// products with E4M3 are those of float32, and products with integers on CPUs round activations to 8 bits by block of 32, unless
// [Options].Exact. Loading takes the memory of the loaded weights, and of one matrix of the folder.
//
// Several GPUs and ranks split matrices of 8 and fewer bits by rows and by columns, with the same numbers. A matrix of the files becomes
// float16 if its columns do not divide into whole blocks, or have an order. Ranks round their own columns: with int8 and E4M3, each rank's
// part of a row has a scale of its own.
//
// # Families
//
// config.json names the family. A configuration that is not known is [ErrUnsupported], with the field and its value. [Register]
// adds a family: a [Network] adds the nodes of its graph with package nn and a [Builder].
//
//	deepseek_v2, deepseek_v3     DeepSeek V2 and V3, without experts; kimi_k2 as deepseek_v3
//	gemma, gemma2, gemma3_text   Gemma 1, 2 and 3
//	granite                      Granite 3
//	llama                        Llama 1 to 3, SmolLM and others of this shape
//	minicpm3                     MiniCPM 3
//	mistral                      Mistral 7B
//	olmo2                        OLMo 2
//	opt                          OPT
//	phi3                         Phi 3
//	qwen2, qwen3                 Qwen 2, 2.5 and 3
//	youtu                        Youtu-LLM
package decoder
