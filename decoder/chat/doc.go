// Package chat renders conversations to prompt text with the chat template of a model.
//
//	templates, err := chat.Open("SmolLM2-135M-Instruct", chat.Options{})
//	...
//	prompt, err := templates.Render(chat.Conversation{
//		Messages: []chat.Message{{Role: "user", Content: "Hello"}},
//		AddGenerationPrompt: true,
//	})
//	...
//	stops, err := templates.EndTokens(specialTokens)
//
// A template is a program in the Jinja language. Package github.com/ardanlabs/jinja runs the statements of a template. Package
// chat implements the operators, filters, tests, methods and functions by Python's rules. The rendered bytes equal the bytes
// that transformers renders.
//
// # Limits
//
// Templates come with models and are not trusted. A template can read only the [Conversation], and the special tokens and the
// clock of [Options]. [Options] limits the call depth, the time and the output of a rendering. A rendering starts no goroutine.
//
// # Unsupported features
//
// A template that uses an unsupported feature is an error with a line and a column. [New] and [Open] report unknown filters and
// tests. As in Jinja, an unknown filter or test inside a condition is an error only when a rendering reaches the filter or test.
//
// Unsupported features:
//
//   - the statements with, block, extends, include, import, do and autoescape
//   - recursive loops
//   - * and ** arguments
//   - Jinja's filters for HTML
package chat
