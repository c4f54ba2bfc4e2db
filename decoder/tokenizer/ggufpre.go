package tokenizer

// Patterns of pre-tokenizers, from the tokenizer files of the models.
const (
	contractions = `(?i:'s|'t|'re|'ve|'m|'ll|'d)`
	gpt2Words    = `'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+`
	ends         = `|\s*[\r\n]+|\s+(?!\S)|\s+`
	llama3Words  = contractions + `|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*` + ends
	qwen2Words   = contractions + `|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*` + ends
	qwen35Words  = contractions + `|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*` + ends
	upper        = `[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]`
	lowerCase    = `[\p{Ll}\p{Lm}\p{Lo}\p{M}]`
	gpt4oWords   = `[^\r\n\p{L}\p{N}]?` + upper + `*` + lowerCase + `+` + contractions + `?|[^\r\n\p{L}\p{N}]?` + upper + `+` + lowerCase + `*` + contractions +
		`?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*` + ends
	tekkenWords = `[^\r\n\p{L}\p{N}]?` + upper + `*` + lowerCase + `+|[^\r\n\p{L}\p{N}]?` + upper + `+` + lowerCase + `*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*` + ends
	kimiUpper   = `[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]`
	kimiLower   = `[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]`
	kimiWords   = `[\p{Han}]+|[^\r\n\p{L}\p{N}]?` + kimiUpper + `*` + kimiLower + `+` + contractions + `?|[^\r\n\p{L}\p{N}]?` + kimiUpper + `+` + kimiLower + `*` +
		contractions + `?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*` + ends
	asciiMarks     = `[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_` + "`" + `{|}~]`
	deepseek3Words = asciiMarks + `[A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*` + ends
	bloomWords     = ` ?[^(\s|.,!?…。，、।۔،)]+`
	// letters of scripts with cases, in Unicode 13
	deepseekLetters = `[A-Za-z\x{b5}\x{c0}-\x{d6}\x{d8}-\x{f6}\x{f8}-\x{1ba}\x{1bc}-\x{1bf}\x{1c4}-\x{293}\x{295}-\x{2af}\x{370}-\x{373}\x{376}\x{377}\x{37b}-\x{37d}` +
		`\x{37f}\x{386}\x{388}-\x{38a}\x{38c}\x{38e}-\x{3a1}\x{3a3}-\x{3f5}\x{3f7}-\x{481}\x{48a}-\x{52f}\x{531}-\x{556}\x{10a0}-\x{10c5}\x{13a0}-\x{13f5}` +
		`\x{13f8}-\x{13fd}\x{1c90}-\x{1cba}\x{1cbd}-\x{1cbf}\x{1d00}-\x{1d2b}\x{1d6b}-\x{1d77}\x{1d79}-\x{1d9a}\x{1e00}-\x{1f15}\x{1f18}-\x{1f1d}\x{1f20}` +
		`-\x{1f45}\x{1f48}-\x{1f4d}\x{1f50}-\x{1f57}\x{1f59}\x{1f5b}\x{1f5d}\x{1f5f}-\x{1f7d}\x{1f80}-\x{1fb4}\x{1fb6}-\x{1fbc}\x{1fbe}\x{1fc2}-\x{1fc4}` +
		`\x{1fc6}-\x{1fcc}\x{1fd0}-\x{1fd3}\x{1fd6}-\x{1fdb}\x{1fe0}-\x{1fec}\x{1ff2}-\x{1ff4}\x{1ff6}-\x{1ffc}\x{2102}\x{2107}\x{210a}-\x{2113}\x{2115}` +
		`\x{2119}-\x{211d}\x{2124}\x{2126}\x{2128}\x{212a}-\x{212d}\x{212f}-\x{2134}\x{2139}\x{213c}-\x{213f}\x{2145}-\x{2149}\x{214e}\x{2183}\x{2184}` +
		`\x{2c00}-\x{2c7b}\x{2c7e}-\x{2ce4}\x{2ceb}-\x{2cee}\x{2cf2}\x{2cf3}\x{a640}-\x{a66d}\x{a680}-\x{a69b}\x{a722}-\x{a76f}\x{a771}-\x{a787}\x{a78b}` +
		`-\x{a78e}\x{ab70}-\x{abbf}\x{fb00}-\x{fb06}\x{fb13}-\x{fb17}\x{ff21}-\x{ff3a}\x{ff41}-\x{ff5a}\x{10400}-\x{1044f}\x{104b0}-\x{104d3}\x{104d8}` +
		`-\x{104fb}\x{10c80}-\x{10cb2}\x{10cc0}-\x{10cf2}\x{118a0}-\x{118df}\x{1e900}-\x{1e943}]`
	cjk = `[\x{4e00}-\x{9fa5}\x{800}-\x{4e00}\x{ac00}-\x{d7ff}]+`
)

// preTokenizer is a pre-tokenizer that tokenizer.ggml.pre names.
type preTokenizer struct {
	patterns     []string // in order; the text between matches is also a piece
	ignoreMerges bool
	bos          bool // default of add_bos_token
	noBytes      bool // BPE on characters, with byte tokens such as <0x0A>, and ▁ for spaces
}

var (
	gpt2Pre   = preTokenizer{patterns: []string{gpt2Words}}
	digitsPre = preTokenizer{patterns: []string{`\p{N}`, gpt2Words}}
	llama3Pre = preTokenizer{patterns: []string{llama3Words}, ignoreMerges: true, bos: true}
	qwen2Pre  = preTokenizer{patterns: []string{qwen2Words}}
	gpt4oPre  = preTokenizer{patterns: []string{gpt4oWords}}
	glmPre    = preTokenizer{patterns: []string{llama3Words}}
	bloomPre  = preTokenizer{patterns: []string{bloomWords}}
	deep3Pre  = preTokenizer{patterns: []string{`\p{N}{1,3}`, `[一-龥぀-ゟ゠-ヿ]+`, deepseek3Words}}
	ayaPre    = preTokenizer{patterns: []string{`\d{1,3}(?=(?:\d{3})*\b)`, gpt4oWords}}
	bailPre   = preTokenizer{patterns: []string{`'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+`}}
	gemmaPre  = preTokenizer{noBytes: true}
)

// preTokenizers maps the supported values of tokenizer.ggml.pre to pre-tokenizers. Old files have no value.
var preTokenizers = map[string]preTokenizer{
	"": defaultPre, "default": defaultPre,
	"llama3": llama3Pre, "llama-v3": llama3Pre, "llama-bpe": llama3Pre, "falcon3": llama3Pre, "falcon-h1": llama3Pre, "pixtral": llama3Pre, "midm-2.0": llama3Pre,
	"lfm2": llama3Pre, "jina-v5-nano": llama3Pre,
	"dbrx": glmPre, "smaug-bpe": glmPre, "chatglm-bpe": glmPre,
	"glm4": {patterns: glmPre.patterns, ignoreMerges: true}, "glm5": {patterns: glmPre.patterns, ignoreMerges: true},
	"deepseek-llm":   {patterns: []string{`[\r\n]`, `\s?` + deepseekLetters + `+`, `\s?[!-/:-~\x{ff01}-\x{ff0f}\x{ff1a}-\x{ff5e}\x{2018}-\x{201f}\x{3000}-\x{3002}]+`, `\s+\z`, cjk, `\p{N}+`}},
	"deepseek-coder": {patterns: []string{`[\r\n]`, `\s?\p{L}+`, `\s?\p{P}+`, cjk, `\p{N}`}},
	"deepseek-v3":    deep3Pre, "hunyuan-dense": deep3Pre, "joyai-llm": deep3Pre, "hy_v4": deep3Pre,
	"falcon":    {patterns: []string{"[\\p{P}\\$\\+<=>\\^~\\|`]+", gpt2Words, `[0-9][0-9][0-9]`}},
	"starcoder": digitsPre, "refact": digitsPre, "command-r": digitsPre, "smollm": digitsPre, "codeshell": digitsPre, "exaone": digitsPre, "minerva-7b": digitsPre,
	"mellum2": digitsPre,
	"gpt-2":   gpt2Pre, "phi-2": gpt2Pre, "jina-es": gpt2Pre, "jina-de": gpt2Pre, "gigachat": gpt2Pre, "jina-v2-es": gpt2Pre, "jina-v2-de": gpt2Pre, "a.x-4.0": gpt2Pre,
	"mellum": gpt2Pre, "modern-bert": gpt2Pre, "mpt": gpt2Pre, "olmo": gpt2Pre, "jais": gpt2Pre, "trillion": gpt2Pre, "granite-docling": gpt2Pre, "exaone4": gpt2Pre,
	"stablelm2": qwen2Pre, "qwen2": qwen2Pre, "deepseek-r1-qwen": qwen2Pre, "kormo": qwen2Pre, "f2llmv2": qwen2Pre, "megrez": qwen2Pre, "hunyuan": qwen2Pre,
	"solar-open": qwen2Pre, "grok-2": qwen2Pre,
	"qwen35":    {patterns: []string{qwen35Words}},
	"poro-chat": bloomPre, "bloom": bloomPre, "gpt3-finnish": bloomPre,
	"viking": {patterns: []string{bloomWords, `\p{N}`}},
	"tekken": {patterns: []string{tekkenWords}, ignoreMerges: true, bos: true},
	"gpt-4o": gpt4oPre, "llama4": gpt4oPre, "kanana2": gpt4oPre, "talkie": gpt4oPre, "minimax-m2": gpt4oPre,
	"granite-embed-multi-97m": {patterns: gpt4oPre.patterns, ignoreMerges: true},
	"tiny_aya":                ayaPre, "cohere2moe": ayaPre,
	"bailingmoe": bailPre, "bailingmoe2": bailPre, "llada-moe": bailPre,
	"kimi-k2":    {patterns: []string{kimiWords}},
	"minicpm5":   {patterns: []string{`\p{N}{1,3}`, contractions + `|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}+| ?[^\s\p{L}\p{N}]+[\r\n]*` + ends}, ignoreMerges: true},
	"seed-coder": {patterns: []string{contractions + `|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+` + ends}},
	"laguna":     {patterns: []string{`[^\n]+|[\n]+`, qwen2Words}},
	"gemma4":     gemmaPre, "granite-embed-multi-311m": gemmaPre,
}

// defaultPre is llama.cpp's pre-tokenizer for files that name none.
var defaultPre = preTokenizer{patterns: []string{`[\p{P}\$\+<=>\^~\|]+`, gpt2Words, `\p{N}+`, `[0-9][0-9][0-9]`}}
