// Package serve answers the HTTP interface of OpenAI with an engine of package decoder.
//
//	server, err := serve.New(model, engine, serve.Options{})
//	...
//	err = http.ListenAndServe("127.0.0.1:8080", server)
//
// Command leanlm serve has flags for all of it.
//
// # Paths
//
//	POST /v1/completions        continues prompts
//	POST /v1/chat/completions   answers conversations, if the model has a chat template
//	GET  /v1/models             the model; /v1/models/NAME is the same
//	POST /tokenize              the tokens of a prompt or of a conversation
//	GET  /health                200 while the server takes requests, else 503
//	GET  /metrics               counters in the text format of Prometheus
//	GET  /                      a page with a chat, and with the state of the batch and of the cache
//
// # Fields
//
// Fields of requests are those of OpenAI. A field that is null is absent. A field that the server does not know is an error that names
// the field, and so is a value out of range. The fields of both paths are
//
//	model                       the name of the model, or absent
//	n                           choices for each prompt
//	max_tokens                  absent: 16 for completions, and all of the context for chats
//	temperature, top_p, seed    absent: as the model's files say, temperature 1 if the files say none; a random seed
//	stop                        a text or a list of texts
//	presence_penalty, frequency_penalty, logit_bias
//	stream, stream_options      include_usage
//	user                        without effect
//	priority                    a whole number, as vLLM has it: requests with a lower number come first, and take memory of the cache from
//	                            others when it is full; absent: 0
//	timeout                     seconds until the request ends with status 504, at most those of Options.Time
//
// Penalties count the tokens of the prompt, too. /v1/completions has
//
//	prompt                      a text, tokens, or a list of texts or of tokens
//	best_of                     of so many choices, those n with the largest mean log-probability; not with stream
//	logprobs                    most likely tokens beside each token
//
// and /v1/chat/completions has
//
//	messages                    roles system, developer (as system), user, assistant and tool; content is a text, or parts of texts
//	max_completion_tokens       as max_tokens
//	logprobs, top_logprobs
//	response_format             {"type": "text"}, {"type": "json_object"} for any object, or {"type": "json_schema", "json_schema": {"name": "...",
//	                            "schema": {...}}}; package jsonschema has the keywords; not with tools or stop
//	tools                       functions, if the chat template has a place for them; strict needs a tool_choice that asks for a call
//	tool_choice                 "auto": the model chooses; "none": the model does not see tools; "required", or {"type": "function",
//	                            "function": {"name": "..."}}: the answer is a call, with arguments within the schema parameters
//	metadata, store, service_tier, parallel_tool_calls
//	                            without effect; store may be false, service_tier "auto"
//
// An answer with response_format that ends with finish_reason "stop" is JSON that satisfies the schema, for any value of strict. An
// answer that ends with "length" is the beginning of such JSON. The prompt does not tell the model of the schema.
//
// The name of a special token in a prompt or in a message is ordinary text.
//
// An answer that calls tools has these calls as tool_calls, with finish_reason "tool_calls". A stream shows what comes before the calls,
// and then all calls in one event. Calls in another form than that of chat.FindCalls stay text.
//
// With tool_choice "required" or a function's name, the answer is one call. If the answer ends with finish_reason "length", the content is
// the beginning of a JSON object with the call's name and arguments.
//
// # Errors
//
// An error is a JSON object as OpenAI has it, with these statuses:
//
//	400   a wrong request; code context_length_exceeded for a prompt that is too long
//	401   no API key, or a wrong one
//	403   a Host or an Origin that is not allowed
//	404   no such path or model
//	405   another method
//	413   a body that is too long
//	415   a body that is no JSON
//	429   the queue is full; Retry-After says in how many seconds to try again
//	500   the engine failed
//	503   the server is stopping
//	504   the request took too long
//
// A stream that has begun ends with an event that has the error.
//
// # Security
//
// A request must address a loopback address or a name of Options.Hosts, so that a web page with a name of its own cannot reach the
// server (DNS rebinding). Requests of other web pages are refused, unless Options.Origins allows the page. A chat template is not
// trusted: see package chat for the limits.
package serve
