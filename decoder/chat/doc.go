// Package chat writes conversations as the text that a model was trained on, by the chat template of the model.
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
// A template is a program in Jinja's language. Package github.com/ardanlabs/jinja runs it, and this package has the operators,
// filters, tests, methods and functions, with Python's rules: a template gives the bytes that transformers gives.
//
// # Limits
//
// Templates come with models, so they are not trusted. A template reads nothing but the conversation, the tokens, the variables
// and the clock of [Options]. The depth of its calls, its time and its output are limited, see [Options]. A rendering starts no
// goroutine.
//
// # What is refused
//
// A template that uses what this package does not know is an error, with line and column. Filters and tests are checked by
// [New] and [Open], and inside of conditions when they are reached, as Jinja does. Not known: the statements with, block,
// extends, include, import, do and autoescape, recursive loops, arguments in * and **, and the filters of Jinja for HTML.
package chat
